"""The stages. Each module has `inputs`, `settings` and `run`; see `stages/stage.py`."""
