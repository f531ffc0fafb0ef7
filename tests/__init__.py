"""Tests of dspark_train."""

import os

# Triton reads it once, when it is imported: its kernels run on a CPU, in its interpreter
os.environ.setdefault("TRITON_INTERPRET", "1")
