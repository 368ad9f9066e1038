"""The options of the command line: their names, help, types and KVTOP_ variables, once for all commands.

Invariant: each option's variable is KVTOP_ and its long name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DeviceName = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float32", "float64"]
OpsName = Literal["auto", "reference", "cpu", "triton"]
AttentionName = Literal["auto", "triton", "flash-attn", "flashinfer"]
EarlyStopName = Literal["no", "yes", "never"]
PolicyName = Literal["fcfs", "priority"]
ViewName = Literal["chat", "ops", "all"]
KvDtypeName = Literal["auto", "bfloat16", "fp8", "float32"]


def opt(help: str, *names: str, **more: Any) -> Any:
    """An option with its KVTOP_ variable, named after its long form."""
    long = next(n for n in names if n.startswith("--")).partition("/")[0]
    return typer.Option(*names, help=help, envvar="KVTOP_" + long[2:].replace("-", "_").upper(), **more)


Model = Annotated[str | None, opt("Hub id, folder or .gguf; the built-in model without.", "--model")]
Revision = Annotated[str | None, opt("Branch, tag or commit on the hub.", "--revision")]
Device = Annotated[DeviceName, opt("Where to compute.", "--device")]
Dtype = Annotated[DType, opt("Of weights, activations and KV; auto is bfloat16.", "--dtype")]
Ops = Annotated[OpsName, opt("Which kernels.", "--ops")]
Attention = Annotated[
    AttentionName, opt("Whose attention kernels on a GPU; auto is triton, our own.", "--attention-backend")
]
BlockSize = Annotated[int, opt("Tokens a block, a power of two.", "--block-size")]
NumBlocks = Annotated[int | None, opt("KV blocks, the null block included.", "--num-blocks")]
KvMemory = Annotated[
    str | None, opt("Memory for KV, like 192MiB or 2G.", "--kv-cache-memory", metavar="SIZE")
]
GpuPart = Annotated[float, opt("Part of a GPU's memory to use.", "--gpu-memory-utilization")]
MaxLen = Annotated[int | None, opt("Longest sequence in tokens.", "--max-model-len")]
Budget = Annotated[int | None, opt("Tokens a step.", "--max-num-batched-tokens")]
MaxSeqs = Annotated[int, opt("Sequences that run at once.", "--max-num-seqs")]
Caching = Annotated[
    bool, opt("Reuse computed prefixes.", "--enable-prefix-caching/--no-enable-prefix-caching")
]
Chunked = Annotated[
    bool, opt("Split long prompts over steps.", "--enable-chunked-prefill/--no-enable-chunked-prefill")
]
Async = Annotated[
    bool | None,
    opt(
        "Plan and launch a step before the one in flight is done; on a GPU without being asked.",
        "--async-scheduling/--no-async-scheduling",
    ),
]
LongPrefill = Annotated[
    int,
    opt(
        "Most tokens of one prompt a step while others wait; 0 is no limit.", "--long-prefill-token-threshold"
    ),
]
Adaptive = Annotated[
    bool,
    opt(
        "That threshold is at least an equal share of the step.",
        "--long-prefill-token-threshold-adaptive/--no-long-prefill-token-threshold-adaptive",
    ),
]
Policy = Annotated[PolicyName, opt("Who is admitted first and preempted last.", "--scheduling-policy")]
Watermark = Annotated[float, opt("Part of the blocks that admissions leave free.", "--watermark")]
QueuedRequests = Annotated[
    int | None, opt("Requests that may wait; more are refused.", "--max-num-queued-requests")
]
QueuedTokens = Annotated[
    int | None, opt("Tokens that may wait; more are refused.", "--max-num-queued-tokens")
]
AuditOf = Annotated[
    int, opt("Compute one of N cache hits again and compare; 0 none.", "--audit", metavar="N")
]
Seed = Annotated[int, opt("Of the sampling.", "--seed")]
HashSeed = Annotated[int | None, opt("Of the block hashes; random without.", "--hash-seed")]
Threads = Annotated[int | None, opt("CPU threads; all cores without.", "--threads")]

Simulate = Annotated[
    str | None, opt("Compute nothing: this model as it would run --on a GPU.", "--simulate", metavar="MODEL")
]
On = Annotated[str | None, opt("The simulated GPU, like h100 or 4xh200.", "--on", metavar="DEVICE")]
Speed = Annotated[
    float | None,
    opt("Simulated seconds a second; 1 in the dashboard, without it as fast as possible.", "--speed"),
]
LoadName = Annotated[
    str | None,
    opt("Requests that arrive by themselves: hour, chat, … or a .toml.", "--load", metavar="NAME|FILE"),
]

Prompt = Annotated[list[str] | None, opt("Ask this; may be given several times.", "--prompt", "-p")]
Prompts = Annotated[
    str | None,
    opt(
        "A prompt a line, or JSONL {prompt, system, max_tokens, …}; - reads stdin.",
        "--prompts",
        metavar="FILE",
    ),
]
System = Annotated[str | None, opt("System message.", "--system", metavar="TEXT|@FILE")]
Samples = Annotated[int | None, opt("Samples of each prompt, which share its blocks.", "--n")]
Beam = Annotated[int | None, opt("Beam search with so many beams.", "--beam-width", "--beam")]
LengthPenalty = Annotated[
    float | None, opt("Of beam search: over 1 favours long answers, under 1 short ones.", "--length-penalty")
]
EarlyStop = Annotated[
    EarlyStopName | None,
    opt(
        "Beam search ends: yes with the first hypotheses, no or never when none can get better.",
        "--early-stopping",
    ),
]
Speculate = Annotated[
    int, opt("Tokens looked up in the text so far and verified in one step; 0 is none.", "--speculate")
]
MaxTokens = Annotated[int | None, opt("Most tokens to generate (256).", "--max-tokens")]
Temperature = Annotated[float | None, opt("0 is greedy; the model's own without.", "--temperature")]
TopK = Annotated[int | None, opt("Keep the k likeliest tokens.", "--top-k")]
TopP = Annotated[float | None, opt("Keep tokens up to this probability.", "--top-p")]
MinP = Annotated[float | None, opt("Drop tokens under this part of the likeliest.", "--min-p")]
Stop = Annotated[list[str] | None, opt("Text that ends an answer; may be given several times.", "--stop")]
MinTokens = Annotated[int | None, opt("No end before so many tokens.", "--min-tokens")]
Repetition = Annotated[
    float | None, opt("Over 1: what stood before comes less often.", "--repetition-penalty")
]
Presence = Annotated[float | None, opt("Off the logit of each token in the answer.", "--presence-penalty")]
Frequency = Annotated[float | None, opt("The same for each time it stands there.", "--frequency-penalty")]
BadWords = Annotated[
    list[str] | None, opt("Text that must not come up; may be given several times.", "--bad-words")
]
StopIds = Annotated[
    list[int] | None, opt("Token id that ends an answer; may be given several times.", "--stop-token-ids")
]
LogProbs = Annotated[
    int | None, opt("With --json: each token's log probability, and of the k likeliest.", "--logprobs")
]
Salt = Annotated[str | None, opt("Shares cached blocks only with the same salt.", "--salt")]
IgnoreEos = Annotated[bool | None, opt("Go on after the end token.", "--ignore-eos")]

Headless = Annotated[bool, opt("No dashboard; so also without a terminal.", "--headless")]
AsJson = Annotated[bool, opt("JSON on stdout: a line a step, then the summary.", "--json")]
Once = Annotated[bool, opt("With --json: the summary alone.", "--once")]
Concurrent = Annotated[bool, opt("All prompts at once.", "--concurrent")]
Record = Annotated[Path | None, opt("Write a recording, .jsonl or .jsonl.gz.", "--record", metavar="FILE")]
Redact = Annotated[bool, opt("Keep no text and no token ids in the recording.", "--redact")]
Slow = Annotated[float, opt("Slow motion: seconds between steps.", "--slow", min=0, max=60)]

Theme = Annotated[str | None, opt("Name, or a .toml file.", "--theme")]
View = Annotated[ViewName | None, opt("What to show first.", "--view")]
Fps = Annotated[float | None, opt("Frames a second.", "--fps", min=0.5, max=120)]
Motion = Annotated[bool, opt("Sweeps and flashes.", "--motion/--no-motion")]
File = Annotated[Path, typer.Argument(help="A recording.", metavar="FILE")]
Quantize = Annotated[
    Literal["int8", "int4", "fp8"] | None,
    opt("Compute with quantised weights; a GGUF's 4-bit codes stay as they are.", "--quantization"),
]


Memory = Annotated[str, opt("Of the GPU, like 80GiB; of several their sum.", "--memory", metavar="SIZE")]
Weights = Annotated[
    str | None,
    opt("bf16, fp8, int8, int4 or a SIZE. Live: as --quantization.", "--weights", metavar="FORMAT|SIZE"),
]
Overhead = Annotated[str, opt("For activations, graphs and libraries.", "--overhead", metavar="SIZE")]
AvgTokens = Annotated[int, opt("Prompt and answer of an average request.", "--avg-tokens")]
Contexts = Annotated[
    list[int] | None, opt("Longest sequence to plan for; may be given several times.", "--context")
]
GpuHour = Annotated[float | None, opt("Dollars an hour for that memory's GPUs.", "--gpu-hour")]
Itl = Annotated[float, opt("Milliseconds a token of each request, for the price.", "--itl")]
KvDtype = Annotated[
    KvDtypeName, opt("Of keys and values; a live engine has auto and fp8.", "--kv-cache-dtype")
]
