from rlhf_infer.engine import TransformersEngine as TransformersEngine
from rlhf_infer.judges import Judge as Judge
from rlhf_infer.judges import PromptedJudge as PromptedJudge
from rlhf_infer.judges import RuleJudge as RuleJudge
from rlhf_infer.judges import verdict_rule as verdict_rule
from rlhf_infer.protocol import GenerationEngine as GenerationEngine
from rlhf_infer.protocol import LogitsProcessor as LogitsProcessor
from rlhf_infer.protocol import Rollout as Rollout
from rlhf_infer.protocol import SamplingParams as SamplingParams
from rlhf_infer.rewards import ConstitutionalRewardWrapper as ConstitutionalRewardWrapper
from rlhf_infer.rewards import RewardFunctionFactory as RewardFunctionFactory
from rlhf_infer.rewards import RewardFunctions as RewardFunctions
from rlhf_infer.rewards import RewardScores as RewardScores
from rlhf_infer.vllm_engine import VLLMEngine as VLLMEngine
from rlhf_infer.vllm_remote import VLLMServerEngine as VLLMServerEngine
from rlhf_infer.vllm_server import VLLMServer as VLLMServer
from rlhf_infer.vllm_settings import VLLMSettings as VLLMSettings
from rlhf_infer.weight_folder import write_weight_folder as write_weight_folder

__all__: list[str]
