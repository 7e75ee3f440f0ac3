"""Every number of the simulator, with where it is published. Seconds unless the name says more.

Sources, as the comments name them:

[RobustRL]   OSDI '26, arXiv 2512.22492
[ByteRobust] SOSP '25, arXiv 2509.16293
[Llama 3]    arXiv 2407.21783, the table of interruptions in 54 days
[RSC]        "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
             arXiv 2410.21680
[FT-HSDP]    arXiv 2602.00277, abstract
second-hand  the figure was read in a text about the source, or off one of its plots
assumption   nobody publishes it; said where it matters
calibration  solved for by `targets.py`, printed in every report
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DAY_S = 86_400.0
GPUS_PER_MACHINE = 8  # [RobustRL] set-up: 32 machines of 8 H20

# The workload ------------------------------------------------------------------------------

PROMPTS_PER_STEP = 64  # [RobustRL] set-up: global batch 512 = 64 prompts x 8 responses
SAMPLES_PER_PROMPT = 8  # [RobustRL] set-up
LENGTH_SIGMA = 0.5  # assumption: log-normal lengths; they only enter the split over groups
SEMI_SYNC_FRACTION = 0.5  # [RobustRL] set-up: 50 % rolled out before training starts
MAX_POLICY_AGE = 1  # assumption: one step off-policy, the shipped configuration's value

STRESS_STEPS = 100  # [RobustRL] set-up: 100 steps, a fault in each window of 10 % of them
STRESS_FAULTS = 10
STRESS_GPUS = 128  # [RobustRL] set-up: end-to-end time and ETTR
SWEEP_STEPS = 50  # [RobustRL] set-up of the fault sweep: 50 steps on 64 GPUs, 1 to 5 faults
SWEEP_FAULTS = (1, 2, 3, 4, 5)
SWEEP_GPUS = 64
BASELINE_SAVE_EVERY = 5  # [RobustRL] fault sweep: ByteRobust saves every 5 steps
OWN_SAVE_EVERY = 1  # [RobustRL] fault sweep: RobustRL saves every step

# What recovery takes -----------------------------------------------------------------------


@dataclass(frozen=True)
class RestartTimes:
    trainer_s: float
    job_s: float


RESTART_8B = RestartTimes(173.0, 277.8)  # [RobustRL] restart times, second-hand, off a plot
RESTART_32B = RestartTimes(182.6, 305.5)  # [RobustRL] the same

SCHEDULE_S = 30.0  # [RobustRL] a rollout machine is replaced in 119 s: the four parts
CONTAINER_S = 30.0  # [RobustRL]
ENGINE_START_S = 49.0  # [RobustRL]
ENGINE_WEIGHTS_S = 10.0  # [RobustRL]
REFILL_S = SCHEDULE_S + CONTAINER_S + ENGINE_START_S + ENGINE_WEIGHTS_S
LAMINAR_REFILL_S = 252.0  # Laminar, second-hand: one machine (with 2 rollout replicas)

SAVE_BLOCKING_S = 3.0  # [RobustRL] checkpoint of each step: 3 s blocking
SAVE_ASYNC_S = 10.0  # [RobustRL] and about 10 s asynchronous
WEIGHT_SYNC_235B_S = 6.0  # [RobustRL] weight sync, 235B in FP16
WEIGHT_SYNC_S = WEIGHT_SYNC_235B_S * 8 / 235  # of 8B, in proportion (assumption)

# What detection takes ----------------------------------------------------------------------

ENGINE_SILENCE_S = 60.0  # [RobustRL] no tokens for 60 s, then a heartbeat
ENGINE_PROBE_S = 60.0  # assumption: its timeout is not published
SLIME_PROBE_S = 600.0  # slime's defaults of interval, timeout and first wait, second-hand


class Inspector(StrEnum):
    """[ByteRobust] what notices a fault, table of detection intervals."""

    GPU = "gpu"
    NETWORK = "network"
    KERNEL = "kernel"
    TIMEOUT = "timeout"


INSPECTION_S = {
    Inspector.GPU: 10.0,  # [ByteRobust]
    Inspector.NETWORK: 30.0,  # [ByteRobust] NIC
    Inspector.KERNEL: 2.0,  # [ByteRobust]
    Inspector.TIMEOUT: 600.0,  # [ByteRobust] "about 10 min" for all else
}


class Symptom(StrEnum):
    """What is seen of a fault from outside the process."""

    EXIT = "exit"  # the process ends
    SILENT = "silent"  # nothing of the machine is heard any more
    STUCK = "stuck"  # it lives, and does not come forward


@dataclass(frozen=True)
class Cause:
    """`count`: interruptions in 54 days on 16,384 GPUs. The other two columns are ours: which of
    [ByteRobust]'s inspections sees it, and how the process looks (assumption)."""

    name: str
    count: int
    inspector: Inspector
    symptom: Symptom


CAUSES = (  # [Llama 3] the table of unexpected interruptions, all 419
    Cause("GPU", 148, Inspector.GPU, Symptom.EXIT),
    Cause("HBM", 72, Inspector.GPU, Symptom.EXIT),
    Cause("software", 54, Inspector.TIMEOUT, Symptom.EXIT),
    Cause("network", 35, Inspector.NETWORK, Symptom.STUCK),
    Cause("host", 32, Inspector.KERNEL, Symptom.SILENT),
    Cause("SRAM", 19, Inspector.GPU, Symptom.EXIT),
    Cause("GPU processor", 17, Inspector.GPU, Symptom.EXIT),
    Cause("NIC", 7, Inspector.NETWORK, Symptom.STUCK),
    Cause("watchdog", 7, Inspector.TIMEOUT, Symptom.STUCK),
    Cause("SDC", 6, Inspector.TIMEOUT, Symptom.EXIT),
    Cause("thermal", 6, Inspector.GPU, Symptom.EXIT),
    Cause("SSD", 3, Inspector.KERNEL, Symptom.SILENT),
    Cause("power supply", 3, Inspector.KERNEL, Symptom.SILENT),
    Cause("chassis", 2, Inspector.KERNEL, Symptom.SILENT),
    Cause("IO board", 2, Inspector.KERNEL, Symptom.SILENT),
    Cause("dependency", 2, Inspector.TIMEOUT, Symptom.EXIT),
    Cause("CPU", 2, Inspector.KERNEL, Symptom.SILENT),
    Cause("memory", 2, Inspector.KERNEL, Symptom.SILENT),
)

INJECTED = Cause("injected", 0, Inspector.GPU, Symptom.EXIT)
"""[RobustRL] does not state the type of its injected faults: taken as processes that are killed,
with the time to notice inside the published restart times (assumption)."""

# Failure rates, per machine and day --------------------------------------------------------

RATE_RSC_2 = 2.34e-3  # [RSC] second-hand: 2.34 per 1,000 node-days
RATE_LLAMA = 3.79e-3  # [Llama 3] 419 in 54 days on 2,048 machines
RATE_RSC_1 = 6.50e-3  # [RSC] second-hand
RATES = {"2.3": RATE_RSC_2, "3.8": RATE_LLAMA, "6.5": RATE_RSC_1}
INFERENCE_RATE_SHARE = 1 / 14  # [RobustRL] quotes inference against training machines as 1 : 14

SCALES_GPUS = (128, 256, 1_024, 4_096, 16_384, 100_000)
GROUP_MACHINES = 32
"""Machines of one replica group at scale: [RobustRL]'s restart times are of jobs of at most 32."""

# Others' figures at scale ------------------------------------------------------------------

STALL_100K_S = 600.0  # [FT-HSDP] a fault stalls 100K GPUs for 10 min
STALL_100K_HSDP_S = 180.0  # [FT-HSDP] 3 min with it
EFFECTIVE_100K = 0.44  # [FT-HSDP]
EFFECTIVE_100K_HSDP = 0.80  # [FT-HSDP]

HOURS_STEP_S = 342.0
"""A step of 5.7 min: the shortest that the hours saved in 100 steps allow (0.8 h of 8.4 % to
2.1 h of 17.4 %, [RobustRL] end-to-end time)."""
