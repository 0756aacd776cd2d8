"""DistributedDataParallel in plain torch: what is often written, and what is right."""

from contextlib import nullcontext
from typing import Any

import problem
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

MAX_NORM = 0.5


def accumulated(how: str) -> tuple[Tensor, int]:
    """Accumulate one global batch; return the gradient and the bytes that a rank exchanged."""
    module = DistributedDataParallel(problem.model())
    exchanged: list[int] = []

    # DDP looks at the annotations of a hook, so that this file has them evaluated.
    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / problem.RANKS)

    module.register_comm_hook(None, hook)
    for step, (x, y) in enumerate(problem.micro_batches()):
        last = step == problem.ACCUMULATION - 1
        exchange = last or how == "without no_sync"
        late = how == "backward alone in no_sync"
        with nullcontext() if exchange or late else module.no_sync():
            loss = problem.loss_sum(module, x, y)
        if how == "mean of means":
            loss = loss / len(y) / problem.ACCUMULATION
        else:
            loss = loss * problem.RANKS / sum(problem.COUNTS)
        with nullcontext() if exchange else module.no_sync():
            loss.backward()
        if how == "clipped in every micro-step":
            clip_grad_norm_(module.parameters(), MAX_NORM)
    if how == "clipped once":
        clip_grad_norm_(module.parameters(), MAX_NORM)
    gradient = module.module.weight.grad
    assert gradient is not None
    return gradient, sum(exchanged)


def scaled_update(*, unscaled_first: bool) -> float:
    """Return the norm of an update at learning rate 1, clipped before or after unscaling."""
    module = problem.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = next(problem.micro_batches())
    scaler.scale(problem.loss_sum(module, x, y)).backward()
    if unscaled_first:
        scaler.unscale_(optimizer)
    clip_grad_norm_(module.parameters(), MAX_NORM)
    scaler.step(optimizer)
    return float((module.weight - problem.START).norm())


def main() -> None:
    """Try everything once."""
    dist.init_process_group("gloo")
    true = problem.whole_gradient()
    clipped = true * min(1.0, MAX_NORM / float(true.norm()))
    found: dict[str, Any] = {"accumulation": problem.ACCUMULATION, "one": true.nbytes}
    for how in (
        "right",
        "without no_sync",
        "backward alone in no_sync",
        "mean of means",
        "clipped in every micro-step",
        "clipped once",
    ):
        gradient, exchanged = accumulated(how)
        expected = clipped if how.startswith("clipped") else true
        found[how] = {"error": problem.apart(gradient, expected), "bytes": exchanged}
        if how == "mean of means":
            found[how]["as predicted"] = problem.apart(gradient, problem.mean_of_means())
    found["clipped before unscaling"] = scaled_update(unscaled_first=False)
    found["clipped after unscaling"] = scaled_update(unscaled_first=True)
    found["bound"] = MAX_NORM
    problem.tell(**found)
    problem.leave()


main()
