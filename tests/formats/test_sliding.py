"""No format of others says what our sliding layers do, so none is written."""

import pytest

from dspark_train.drafter import DrafterConfig
from dspark_train.formats.table import DESTINATIONS, NATIVE, carriers, refuse_uncarried


@pytest.mark.parametrize("name", DESTINATIONS)
def test_sliding_layers_are_refused(name: str) -> None:
    plain, config = DrafterConfig(), DrafterConfig(sliding_window=16)
    assert carriers(config) == [NATIVE]
    if name in carriers(plain):
        refuse_uncarried(DESTINATIONS[name], plain)
        with pytest.raises(ValueError, match="cannot carry sliding layers"):
            refuse_uncarried(DESTINATIONS[name], config)
