"""Every setting of one run, with its unit and scope, validated once before anything launches.

`RunConfig.from_mapping` takes the plain mapping that Hydra composed (or that a test wrote) and
either returns a validated configuration or raises `ConfigError` with one line per problem.
The scope of a setting is what it changes:

* *trajectory*: it decides the loss curve, and is part of `trajectory_id`;
* *run*: it decides memory and time but not the loss curve, and is part of `run_id`;
* *display*: it changes neither, and an identical run is not repeated because of it.
"""

from batchscape.config.batch import (
    Batch,
    Budget,
    Evaluation,
    RampStage,
)
from batchscape.config.command import (
    Command,
    ExternalData,
    ExternalModel,
)
from batchscape.config.data import (
    CustomData,
    Data,
    Digits,
    Documents,
    StandardLibrary,
    TextFiles,
    TokenFiles,
)
from batchscape.config.engine import (
    Accelerate,
    Ddp,
    DeepSpeed,
    Engine,
    Fabric,
    Fsdp,
    InProcess,
)
from batchscape.config.execution import (
    Checkpoint,
    Device,
    Launcher,
    Loader,
    Local,
    Measure,
    NoTracker,
    Tracker,
    WandbTracker,
)
from batchscape.config.metrics import (
    JsonlMetrics,
    LitGptCsvMetrics,
    Metrics,
    RecorderMetrics,
    RegexMetrics,
    TrainerStateMetrics,
)
from batchscape.config.model import (
    CustomModel,
    Gpt,
    Llama,
    Mlp,
    Model,
    Transformers,
)
from batchscape.config.optimizer import (
    AdamW,
    Constant,
    Cosine,
    Muon,
    Optimizer,
    Scaling,
    Schedule,
    Sgd,
    WarmupStableDecay,
)
from batchscape.config.run import (
    RunConfig,
)

__all__ = [
    "Accelerate",
    "AdamW",
    "Batch",
    "Budget",
    "Checkpoint",
    "Command",
    "Constant",
    "Cosine",
    "CustomData",
    "CustomModel",
    "Data",
    "Ddp",
    "DeepSpeed",
    "Device",
    "Digits",
    "Documents",
    "Engine",
    "Evaluation",
    "ExternalData",
    "ExternalModel",
    "Fabric",
    "Fsdp",
    "Gpt",
    "InProcess",
    "JsonlMetrics",
    "Launcher",
    "LitGptCsvMetrics",
    "Llama",
    "Loader",
    "Local",
    "Measure",
    "Metrics",
    "Mlp",
    "Model",
    "Muon",
    "NoTracker",
    "Optimizer",
    "RampStage",
    "RecorderMetrics",
    "RegexMetrics",
    "RunConfig",
    "Scaling",
    "Schedule",
    "Sgd",
    "StandardLibrary",
    "TextFiles",
    "TokenFiles",
    "Tracker",
    "TrainerStateMetrics",
    "Transformers",
    "WandbTracker",
    "WarmupStableDecay",
]
