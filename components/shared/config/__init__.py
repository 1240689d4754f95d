"""The configuration of a run."""

from steadytrain.components.shared.config.compute import (
    ComputeConfig,
    PodsConfig,
    SpotConfig,
    VolumeConfig,
)
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.shared.config.evaluation import (
    EvaluationConfig,
    GateConfig,
    RegistryConfig,
    RetrainConfig,
    TrackingConfig,
)
from steadytrain.components.shared.config.load import from_mapping, load, preset_names
from steadytrain.components.shared.config.model import AdapterConfig, ModelConfig
from steadytrain.components.shared.config.operations import PipelineConfig, RecoveryConfig
from steadytrain.components.shared.config.parameters import from_parameters, to_parameters
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.config.tune import (
    AblationConfig,
    CrossValidationConfig,
    Dimension,
    Objective,
    TuneConfig,
)

__all__ = [
    "AblationConfig",
    "AdapterConfig",
    "Columns",
    "ComputeConfig",
    "CrossValidationConfig",
    "DataConfig",
    "Dimension",
    "EvaluationConfig",
    "GateConfig",
    "ModelConfig",
    "Objective",
    "PipelineConfig",
    "PodsConfig",
    "RecoveryConfig",
    "RegistryConfig",
    "RetrainConfig",
    "RunConfig",
    "SpotConfig",
    "TrackingConfig",
    "TrainingConfig",
    "TuneConfig",
    "VolumeConfig",
    "from_mapping",
    "from_parameters",
    "load",
    "preset_names",
    "to_parameters",
]
