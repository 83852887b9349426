"""Weights of published models in and out: directories of ``config.json`` and safetensors files, as ``transformers`` has
them, straight into and out of any layout.

==========  ===============================================================================
families    names of GPT-2, BLOOM, GPT-NeoX, Llama and Mixtral, and what each can hold
mapping     where each element of ours lies in theirs; pure
configs     ``config.json`` and :class:`.TransformerConfig`; pure
files       how large the files of an export become, and where each tensor goes; pure
directory   a directory of files, of which parts are read
reading     :func:`from_huggingface`, :func:`load_huggingface`, :class:`FromHuggingFace`
writing     :func:`to_huggingface`
==========  ===============================================================================

``transformers`` itself is not needed.
"""

from __future__ import annotations

from .errors import HuggingFaceError
from .reading import FromHuggingFace, from_huggingface, huggingface_config, load_huggingface
from .writing import TOKENIZER_FILES, copy_tokenizer, to_huggingface

__all__ = [
    "TOKENIZER_FILES",
    "FromHuggingFace",
    "HuggingFaceError",
    "copy_tokenizer",
    "from_huggingface",
    "huggingface_config",
    "load_huggingface",
    "to_huggingface",
]
