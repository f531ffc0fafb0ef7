"""The picture shows what the mask says; the notebook that draws it runs."""

from pathlib import Path

import pytest
import torch

from dspark_train.blocks import BlockSlots, Sight
from dspark_train.blocks.picture import attention_picture

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "blocks_and_mask.ipynb"


def test_matrix_by_hand() -> None:
    mask = attention_picture(BlockSlots(2), torch.tensor([1, 3]), torch.tensor([0, 2]), 4)
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 0, 1, 1],
    ]
    causal = attention_picture(
        BlockSlots(2), torch.tensor([1, 3]), torch.tensor([0, 2]), 4, Sight(causal=True)
    )
    assert causal.int().tolist()[::2] == [[1, 0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 1, 0]]


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
