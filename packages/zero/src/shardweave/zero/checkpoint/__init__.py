"""Checkpoints that know no layout: saved from one, loaded into any other, optimizer state included.

==============================  ==============================================================================
:func:`save_checkpoint`         all ranks write one checkpoint of an optimizer and its module
:class:`CheckpointWriter`       ... and train on while it is written
:func:`load_checkpoint`         all ranks read one, whatever layout wrote it: :class:`Loaded`
:func:`read_tensors`            whole tensors in one process
:class:`FromCheckpoint`         a rank's slices of parameters, without an optimizer
:func:`complete_checkpoints`    what is in a folder of checkpoints; :func:`checkpoint_path`, :func:`prune_checkpoints`
:func:`read_manifest`           what is in a checkpoint: :class:`Manifest`; :func:`damaged_files`: is it whole
:class:`Placed`                 rectangles of a tensor, for tensors of your own that ranks hold parts of
:func:`sharded_state_dict`      an optimizer's state for DCP's ``save`` and ``load``: :func:`load_sharded_state_dict`
:func:`full_state_dict`         ... as whole tensors on one rank, in torch's shape: :func:`load_full_state_dict`
==============================  ==============================================================================

How it works, from a rank's memory to the disk::

    contents   flat pieces of units  -> named rectangles of full tensors        Placed
    planning   rectangles            -> who writes which, do they fill all      DCP's planner
    storage    rectangles            -> safetensors files, checksums
    folder     files                 -> a directory that is whole or absent
"""

from __future__ import annotations

from .errors import CheckpointError, CheckpointMismatch, CheckpointWriteError
from .folder import (
    checkpoint_path,
    complete_checkpoints,
    damaged_files,
    prune_checkpoints,
    read_manifest,
    recover_checkpoints,
    remove_partials,
)
from .from_full import load_full_state_dict
from .full import full_state_dict
from .loading import Loaded, load_checkpoint, read_manifest_together
from .manifest import Chunk, FileEntry, Group, Manifest, TensorEntry
from .placed import Placed
from .saving import save_checkpoint
from .sharded import load_sharded_state_dict, sharded_state_dict
from .slices import FromCheckpoint
from .whole import parameter_names_of, read_tensors
from .writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointWriteError",
    "CheckpointWriter",
    "Chunk",
    "FileEntry",
    "FromCheckpoint",
    "Group",
    "Loaded",
    "Manifest",
    "Placed",
    "TensorEntry",
    "checkpoint_path",
    "complete_checkpoints",
    "damaged_files",
    "full_state_dict",
    "load_checkpoint",
    "load_full_state_dict",
    "load_sharded_state_dict",
    "parameter_names_of",
    "prune_checkpoints",
    "read_manifest",
    "read_manifest_together",
    "read_tensors",
    "recover_checkpoints",
    "remove_partials",
    "save_checkpoint",
    "sharded_state_dict",
]
