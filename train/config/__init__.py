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
from train.config.optimizer import OptimizerConfig
from train.config.own import build_plan
from train.config.parts import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LogConfig,
    StepConfig,
    StragglerConfig,
)
from train.config.policy_section import (
    DampingPolicy,
    FixedPolicy,
    HoldingPolicy,
    MergedPolicy,
    PolicySection,
    ThinningPolicy,
)
from train.config.rounds_section import (
    CodecName,
    RoundsConfig,
    make_codec,
    sends_models,
)
from train.config.run import FOLLOW_EXCHANGES, Config

__all__ = [
    "FOLLOW_EXCHANGES",
    "ApartExchange",
    "AutoExchange",
    "BackgroundExchange",
    "CheckpointConfig",
    "CodecName",
    "Config",
    "DampingPolicy",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "ExchangeSection",
    "FixedPolicy",
    "GroupExchange",
    "HoldingPolicy",
    "InStepExchange",
    "LogConfig",
    "MergedPolicy",
    "OptimizerConfig",
    "PeerExchange",
    "PolicySection",
    "QuorumExchange",
    "RoundsConfig",
    "StepConfig",
    "StragglerConfig",
    "ThinningPolicy",
    "TopologyConfig",
    "TopologyName",
    "WorkersConfig",
    "build_plan",
    "make_codec",
    "sends_models",
]
