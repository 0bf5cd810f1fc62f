"""What a description leaves out: what no forward reads, or what is another number in each process."""

from __future__ import annotations

import re

OF_CLASSES = frozenset((
    "__doc__", "__dict__", "__weakref__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__",
    "__orig_bases__", "__static_attributes__", "__firstlineno__", "__dataclass_params__", "__dataclass_fields__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__signature__", "__type_params__", "__slots__", "__match_args__", "__qualname__",
))  # fmt: skip
# Set by Dynamo as it traces, and by transformers as it initialises.
OF_TENSORS = ("_dynamo_static_input_type", "_is_hf_initialized")
OF_ENUMS = ("_member_map_", "_value2member_map_", "_member_names_", "_member_type_", "_generate_next_value_", "_new_member_")
# Parts of a module that no forward reads.
UNREAD = re.compile(r"_(load_)?state_dict.*hooks")
# Attributes of transformers' objects that are another number in each process.
HASHES = ("_original_object_hash",)
# Globals in which libraries note what they have done already, and which no value of a forward depends on: (module, name).
NOTES = frozenset((("transformers.utils.generic", "_registered_model_output_types"),))
