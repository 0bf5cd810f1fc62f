"""Pattern matching for fusions: a folder for each op of ours, with the ways in which models write it in plain ops, and what they share.

reading.py  reads a value past casts and factors, and the operands of a commutative op both ways round
guards.py   when a match may be replaced: nothing else reads what is inside, and no memory is written in between
match.py    a match, the search for matches, and the op that replaces one
"""
