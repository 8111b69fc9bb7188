"""Capability suites, offline, and paired tests for regressions by training."""

from rlhf_eval.capability.items import Item as Item
from rlhf_eval.capability.items import read_suite as read_suite
from rlhf_eval.capability.suites import SUITES as SUITES
from rlhf_eval.capability.suites import load_suites as load_suites
from rlhf_eval.capability.tester import CapabilityReport as CapabilityReport
from rlhf_eval.capability.tester import CapabilityTester as CapabilityTester
