"""Pipelines: stages as launched jobs, cached results, promotion after gates. Loads no torch."""

from rlhf_algos.pipeline.config import PipelineConfig as PipelineConfig
from rlhf_algos.pipeline.config import Selection as Selection
from rlhf_algos.pipeline.config import Stage as Stage
from rlhf_algos.pipeline.config import StageConfig as StageConfig
from rlhf_algos.pipeline.kinds import KINDS as KINDS
from rlhf_algos.pipeline.kinds import StageKind as StageKind
from rlhf_algos.pipeline.launch import Planned as Planned
from rlhf_algos.pipeline.measured import check_ratings as check_ratings
from rlhf_algos.pipeline.measured import collapse_alarms as collapse_alarms
from rlhf_algos.pipeline.references import Reference as Reference
from rlhf_algos.pipeline.references import references_in as references_in
from rlhf_algos.pipeline.references import replaced as replaced
from rlhf_algos.pipeline.runner import Pipeline as Pipeline
