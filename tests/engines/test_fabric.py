"""What is particular to Lightning Fabric."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchscape.engines import build_engine

pytestmark = pytest.mark.systems

fabric = pytest.importorskip("lightning_fabric")
environments = pytest.importorskip("lightning_fabric.plugins.environments")

CPU = torch.device("cpu")


def plain(precision):
    """Fabric as a script would use it, on a machine without a cluster."""
    alone = environments.LightningEnvironment()
    return fabric.Fabric(accelerator="cpu", devices=1, precision=precision, plugins=alone)


class Returning(nn.Module):
    """Gives back what it is given, as losses of one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, inputs, labels):
        self.seen = [inputs.dtype, labels.dtype, (inputs @ inputs).dtype]
        return (self.weight * labels).sum(), labels.numel()


def test_float64_is_float64_throughout_which_fabrics_own_is_not(spec_of):
    """With `64-true`, what leaves the model is rounded to float32."""
    rounded = plain("64-true")
    model = rounded.setup(nn.Linear(2, 2))
    assert model.weight.dtype == torch.float64
    assert model(torch.ones(1, 2)).dtype == torch.float32
    spec = spec_of((1, 4, 3), engine={"name": "fabric", "precision": "float64"})
    engine = build_engine(spec, CPU)
    inputs = torch.zeros(4, 32, dtype=torch.long)
    assert engine.micro_step(inputs, inputs, 1.0, last=True).dtype == torch.float64
    engine.close()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_lower_precision_rounds_products_and_no_micro_batch(spec_of, precision):
    """As in ddp; Fabric itself would round the labels of a regression before the loss."""
    from batchscape.engines.fabric import FabricEngine

    spec = spec_of((1, 4, 3), engine={"name": "fabric", "precision": precision})
    model = Returning()
    engine = FabricEngine(
        model, spec.config.engine, spec.config.optimizer, precision, spec.geometry
    )
    labels = torch.tensor([1 + 2**-12])
    loss = engine.micro_step(torch.ones(2, 2), labels, 1.0, last=True)
    assert model.seen == [torch.float32, torch.float32, getattr(torch, precision)]
    assert loss.item() == 1 + 2**-12
    engine.close()
    wrapped = plain("bf16-mixed").setup(Returning())
    assert wrapped(torch.ones(2, 2), labels)[0].item() == 1
