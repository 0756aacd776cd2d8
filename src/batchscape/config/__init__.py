"""Every setting of one run, with its unit and its effect, validated once before a launch.

`RunConfig.from_mapping` takes the plain mapping that Hydra composed (or that a test wrote) and
either returns a validated configuration or raises `ConfigError` with one line per problem.
The type of each field states its effect (`Affects`): on the loss, memory, time, the record, or
nothing. `settings` reads the types; names of runs, and which runs are pooled, follow from them.
"""

from batchscape.config.batch import (
    Batch,
    Budget,
    Evaluation,
    RampStage,
)
from batchscape.config.cluster import Cluster
from batchscape.config.command import (
    Command,
    ExternalData,
    ExternalModel,
)
from batchscape.config.data import (
    CustomData,
    DataSettings,
    Digits,
    Documents,
    TextFiles,
    TokenFiles,
)
from batchscape.config.engine import (
    Accelerate,
    Ddp,
    DeepSpeed,
    EngineSettings,
    Fabric,
    Fsdp,
    InProcess,
    cuts_updates,
)
from batchscape.config.execution import (
    AnyLauncher,
    Checkpoint,
    Device,
    LauncherSettings,
    Loader,
    Local,
    Measure,
    NoTracker,
    Slurm,
    Tracker,
    WandbTracker,
)
from batchscape.config.metrics import (
    JsonlMetrics,
    Metrics,
    RecorderMetrics,
    RegexMetrics,
    TrainerStateMetrics,
)
from batchscape.config.model import (
    CustomModel,
    Gpt,
    LanguageModel,
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
from batchscape.config.search import NoSearch, Objective, Sampler
from batchscape.config.settings import (
    OUR_GROUPS,
    affects_of,
    is_of_our_loop,
    tells_apart,
    that_affect,
)
from batchscape.config.types import Affects

__all__ = [
    "OUR_GROUPS",
    "Accelerate",
    "AdamW",
    "Affects",
    "AnyLauncher",
    "Batch",
    "Budget",
    "Checkpoint",
    "Cluster",
    "Command",
    "Constant",
    "Cosine",
    "CustomData",
    "CustomModel",
    "DataSettings",
    "Ddp",
    "DeepSpeed",
    "Device",
    "Digits",
    "Documents",
    "EngineSettings",
    "Evaluation",
    "ExternalData",
    "ExternalModel",
    "Fabric",
    "Fsdp",
    "Gpt",
    "InProcess",
    "JsonlMetrics",
    "LanguageModel",
    "LauncherSettings",
    "Llama",
    "Loader",
    "Local",
    "Measure",
    "Metrics",
    "Mlp",
    "Model",
    "Muon",
    "NoSearch",
    "NoTracker",
    "Objective",
    "Optimizer",
    "RampStage",
    "RecorderMetrics",
    "RegexMetrics",
    "RunConfig",
    "Sampler",
    "Scaling",
    "Schedule",
    "Sgd",
    "Slurm",
    "TextFiles",
    "TokenFiles",
    "Tracker",
    "TrainerStateMetrics",
    "Transformers",
    "WandbTracker",
    "WarmupStableDecay",
    "affects_of",
    "cuts_updates",
    "is_of_our_loop",
    "tells_apart",
    "that_affect",
]
