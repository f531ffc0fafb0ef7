"""Other people's output, kept away from ours."""

import logging
import os
import warnings


def hear_ourselves() -> None:
    """Let our own warnings through again, which Hydra silences together with its log files."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("dspark_train") and isinstance(logger, logging.Logger):
            logger.disabled = False
    logging.getLogger("dspark_train").setLevel(logging.WARNING)


def silence_libraries() -> None:
    """Keep warnings and progress bars of libraries off the terminal; their errors stay.

    The progress bars of downloads stay as well: they may take minutes.
    """
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module=r"(lightning|torch|transformers)\b")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity(logging.CRITICAL)  # what it reports, we raise
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # the line before switches them off
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns after a fork
