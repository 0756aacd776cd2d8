"""What nothing uses, found by vulture: `python .ci/dead_code.py`, from the root of the checkout.

Tests do not count as a use, and neither does `__all__`, but for that of `batchscape.analysis`,
whose functions are there for notebooks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vulture import Vulture

PLACES = ("src/batchscape", "src/hydra_plugins", "analysis", "benchmarks", "examples")
PUBLIC = Path("analysis/public.py")
ALLOWED = {
    "fields of rows and records, which are written as a whole": """
        allocated_after_model_gib attention_kernel core_wait_s
        energy_source exchange_s exchange_span_s forward_backward_s
        model_flops_per_sample optimizer_s peak_allocated_first_backward_gib
        peak_allocated_first_optimizer_step_gib peak_allocated_steady_gib peak_memory_gib
        peak_memory_method peak_reserved_gib power_capped processor_time_s raw_eval_loss throttled
        train_samples updated_at workspace_gib device_limits""",
    "settings that are read by their names": """
        equivalence_margin equivalence_margin_steps geometry_pattern""",
    "found by name: in a configuration, by an import path, by `__getattr__`": """
        AccelerateEngine ByteText DdpEngine DeepSpeedEngine FabricEngine GridSweeper Patients
        Regressor fsdp_engine __dir__ __getattr__""",
    "called by a library: transformers, Fabric, LitGPT, FSDP, http.server, pytest": """
        BatchscapeCallback _get_train_sampler allocate connect convert_input
        creates_processes_externally do_GET global_rank log_message main_address main_port node_rank
        on_epoch_end on_evaluate on_log on_save on_step_end on_substep_end on_train_begin
        on_train_end pytest_runtest_logreport set_global_rank set_world_size
        val_dataloader""",
    "read by a library: DeepSpeed, torch, transformers, tokenizers, rich": """
        allow_tf32 clip_grad decoder enable_pdl grad_scale logging_nan_inf_filter no_wrap num_labels
        pre_tokenizer use_cache""",
    "parameters that a signature demands": "closure data_parallel_sizes",
    "what a test holds a page to": "STATES",
    "read by the template of the page": "aside",
}


def main() -> int:
    """Print what nothing uses, and what is allowed and used after all."""
    vulture = Vulture()
    for place in PLACES:
        for path in sorted(Path(place).rglob("*.py")):
            code = path.read_text(encoding="utf-8")
            if path != PUBLIC:
                code = re.sub(r"^__all__ = \[.*?\]", _blank, code, flags=re.DOTALL | re.MULTILINE)
            vulture.scan(code, filename=path)
    allowed = set(" ".join(ALLOWED.values()).split())
    unused = vulture.get_unused_code(min_confidence=60)
    dead = [item for item in unused if item.name not in allowed]
    for item in dead:
        print(f"{item.filename}:{item.first_lineno}: nothing uses {item.typ} {item.name}")
    needless = sorted(allowed - {item.name for item in unused})
    if needless:
        print(f"{Path(__file__).name}: used after all, or gone: {', '.join(needless)}")
    return 1 if dead or needless else 0


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


if __name__ == "__main__":
    sys.exit(main())
