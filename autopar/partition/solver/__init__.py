"""The assignment problem and its solver: candidates, states and prices, and not a word of tensors.

Why a solver of our own: it proves the same gap in a thirtieth of HiGHS's time. For a Llama of 1.2 billion parameters on 64 ranks, equal
layers folded, HiGHS alone took 79 s to within 0.5 % of its bound (`IntegerProgram`: 189,368 columns), our whole search 2.2 s; within
a memory budget that binds HiGHS was 6.4 % dearer than ours when it was stopped after two minutes, ours took 2.3 s. What bound search
leaves undecided goes to HiGHS. `python -m benchmarks.search --models llama-1b --highs 120` measures both, seconds of CPU.
"""
