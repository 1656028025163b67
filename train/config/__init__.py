"""All options of a run, as frozen plain values.

A config file holds one `config = Config(...)`. Invalid values raise here, or at their
first use, before anything is compiled.
"""

from train.config.exchange_section import (
    ApartExchange,
    AutoExchange,
    BackgroundExchange,
    ExchangeSection,
    GroupExchange,
    InStepExchange,
    PeerExchange,
    QuorumExchange,
)
from train.config.graph import TopologyConfig, TopologyName, WorkersConfig
from train.config.learning_rate import build_schedule
from train.config.method_section import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    CodecName,
    EveryStepMethod,
    MethodSection,
    RoundsMethod,
    make_codec,
    sends_models,
)
from train.config.optimizer import OptimizerConfig
from train.config.own import build_plan
from train.config.parts import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LogConfig,
    StepConfig,
)
from train.config.policy_section import (
    DampingPolicy,
    FixedPolicy,
    HoldingPolicy,
    MergedPolicy,
    PolicySection,
    ThinningPolicy,
)
from train.config.run import FOLLOW_EXCHANGES, Config

__all__ = [
    "FOLLOW_EXCHANGES",
    "AllReduceMethod",
    "ApartExchange",
    "AtcMethod",
    "AutoExchange",
    "AwcMethod",
    "BackgroundExchange",
    "CheckpointConfig",
    "CodecName",
    "Config",
    "DampingPolicy",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "EveryStepMethod",
    "ExchangeSection",
    "FixedPolicy",
    "GroupExchange",
    "HoldingPolicy",
    "InStepExchange",
    "LogConfig",
    "MergedPolicy",
    "MethodSection",
    "OptimizerConfig",
    "PeerExchange",
    "PolicySection",
    "QuorumExchange",
    "RoundsMethod",
    "StepConfig",
    "ThinningPolicy",
    "TopologyConfig",
    "TopologyName",
    "WorkersConfig",
    "build_plan",
    "build_schedule",
    "make_codec",
    "sends_models",
]
