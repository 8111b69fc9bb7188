from rlhf_infer.rewards.combine import Measured as Measured
from rlhf_infer.rewards.combine import RewardFunctions as RewardFunctions
from rlhf_infer.rewards.combine import RewardScores as RewardScores
from rlhf_infer.rewards.conventions import RewardFunction as RewardFunction
from rlhf_infer.rewards.conventions import TrainerState as TrainerState
from rlhf_infer.rewards.factory import RewardFunctionFactory as RewardFunctionFactory
from rlhf_infer.rewards.factory import load_principles as load_principles
from rlhf_infer.rewards.judged.constitutional import PRINCIPLE_TEMPLATE as PRINCIPLE_TEMPLATE
from rlhf_infer.rewards.judged.constitutional import (
    ConstitutionalRewardWrapper as ConstitutionalRewardWrapper,
)
from rlhf_infer.rewards.judged.constitutional import Principle as Principle
from rlhf_infer.rewards.judged.principle_files import load_principle_texts as load_principle_texts
from rlhf_infer.rewards.normalise import RewardNormaliser as RewardNormaliser
from rlhf_infer.rewards.normalise import normalised as normalised
