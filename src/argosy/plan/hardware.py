"""Chips: rated rates and sizes that the plan divides by, each with its source.

Conventions: dense FLOPs (never the sparse figure); bytes per second per chip and per direction; memory as the
device reports it where that is public, else as sold (1 GB = 1e9 bytes); power is the rated power of the whole
node or rack over its chips, so that host processors, switches and fans are in it.
"""

from dataclasses import dataclass

from argosy import spec


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator with its share of the host and the network."""

    name: str
    label: str
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    domain: int  # chips that the scale-up links join at full rate
    scale_up_bytes_per_s: float  # to the other chips of the domain
    scale_out_bytes_per_s: float  # to chips outside it
    host_bytes: float
    host_bytes_per_s: float  # 0: the host's memory is the device's
    watts: float | None  # None: not published
    source: str


CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip(
            name="gb200",
            label="NVIDIA GB200 (NVL72)",
            bf16_flops_per_s=2.5e15,  # 180 PFLOP/s per rack of 72: the peak of the reference's MFU (reference_run 4)
            fp32_flops_per_s=80e12,  # 5,760 TFLOP/s per rack
            memory_bytes=197_890_015_232.0,  # as the driver reports it (marin#8508)
            memory_bytes_per_s=8e12,
            domain=72,
            scale_up_bytes_per_s=900e9,  # NVLink 5: 1.8 TB/s both ways
            scale_out_bytes_per_s=50e9,  # one 400 Gb/s port per GPU
            host_bytes=240e9,  # 480 GB of LPDDR5X per Grace, two GPUs each
            host_bytes_per_s=225e9,  # NVLink-C2C: 450 GB/s each way per Grace, two GPUs
            watts=120e3 / 72,
            source="NVIDIA Blackwell architecture brief v2.1, table 2, over 72 (marin#7334); GB200 NVL72 data sheet; marin#8508",
        ),
        Chip(
            name="b200",
            label="NVIDIA B200 (DGX)",
            bf16_flops_per_s=2.25e15,
            fp32_flops_per_s=80e12,
            memory_bytes=180e9,  # 1,440 GB per system
            memory_bytes_per_s=8e12,
            domain=8,
            scale_up_bytes_per_s=900e9,
            scale_out_bytes_per_s=50e9,
            host_bytes=250e9,  # 2 TB per system
            host_bytes_per_s=64e9,  # PCIe Gen5 x16
            watts=14.3e3 / 8,
            source="NVIDIA DGX B200 user guide; Blackwell architecture brief, HGX column",
        ),
        Chip(
            name="h200",
            label="NVIDIA H200 (SXM)",
            bf16_flops_per_s=989e12,
            fp32_flops_per_s=67e12,
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            domain=8,
            scale_up_bytes_per_s=450e9,
            scale_out_bytes_per_s=50e9,
            host_bytes=250e9,
            host_bytes_per_s=64e9,
            watts=10.2e3 / 8,
            source="NVIDIA H200 and DGX H200 data sheets",
        ),
        Chip(
            name="h100",
            label="NVIDIA H100 (SXM)",
            bf16_flops_per_s=989e12,
            fp32_flops_per_s=67e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            domain=8,
            scale_up_bytes_per_s=450e9,
            scale_out_bytes_per_s=50e9,
            host_bytes=250e9,
            host_bytes_per_s=64e9,
            watts=10.2e3 / 8,
            source="NVIDIA H100 and DGX H100 data sheets",
        ),
        Chip(
            name="a100",
            label="NVIDIA A100 80 GB (SXM)",
            bf16_flops_per_s=312e12,
            fp32_flops_per_s=19.5e12,
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            domain=8,
            scale_up_bytes_per_s=300e9,
            scale_out_bytes_per_s=25e9,  # 200 Gb/s per GPU
            host_bytes=250e9,
            host_bytes_per_s=32e9,  # PCIe Gen4 x16
            watts=6.5e3 / 8,
            source="NVIDIA A100 and DGX A100 data sheets",
        ),
        Chip(
            name="v6e",
            label="TPU v6e (Trillium)",
            bf16_flops_per_s=918e12,
            fp32_flops_per_s=918e12 / 6,  # a float32 product is six bfloat16 passes
            memory_bytes=32e9,
            memory_bytes_per_s=1.638e12,
            domain=256,
            scale_up_bytes_per_s=400e9,  # 800 GB/s both ways over four ports
            scale_out_bytes_per_s=12.5e9,  # 4 x 200 Gb/s per host of eight
            host_bytes=1536 * 2**30 / 8,
            host_bytes_per_s=64e9 / 2,  # PCIe Gen5, shared in pairs: not published, taken low
            watts=None,
            source="Google Cloud TPU v6e system architecture; the network and host rates are ours",
        ),
        Chip(
            name="v5p",
            label="TPU v5p",
            bf16_flops_per_s=459e12,
            fp32_flops_per_s=459e12 / 6,
            memory_bytes=95.0 * 2**30,
            memory_bytes_per_s=2.765e12,
            domain=6144,  # the largest job on one torus
            scale_up_bytes_per_s=600e9,  # 1,200 GB/s both ways
            scale_out_bytes_per_s=50e9 / 8,  # 50 Gb/s per chip
            host_bytes=448e9 / 4,
            host_bytes_per_s=32e9,  # PCIe: not published, taken low
            watts=None,
            source="Google Cloud TPU v5p system architecture; the host rate is ours",
        ),
        Chip(
            name="cpu",
            label="two CPU cores",
            bf16_flops_per_s=240e9,  # measured, products of 2,048 (no bfloat16 units)
            fp32_flops_per_s=245e9,  # measured, sgemm of 2,048
            memory_bytes=16e9,
            memory_bytes_per_s=25e9,  # measured: 17.6 GB/s per core, copying
            domain=1,
            scale_up_bytes_per_s=25e9,
            scale_out_bytes_per_s=1.25e9,
            host_bytes=0.0,
            host_bytes_per_s=0.0,
            watts=None,
            source="nominal for two x86-64 server cores, on the low side of the sgemm in docs/log.md; one chip = two cores",
        ),
    )
}


def chip(name: str) -> Chip:
    """The chip called `name`.

    >>> chip("gb200").domain
    72

    Raises:
        ValueError: for an unknown chip, naming the nearest three.
    """
    if name not in CHIPS:
        raise ValueError(f"unknown chip {name!r}; nearest: {', '.join(spec.nearest(name, CHIPS))}; known: {', '.join(CHIPS)}")
    return CHIPS[name]


def flops_per_s(run: spec.Run) -> float:
    """Rated FLOP/s of one chip of the run at its precision."""
    c = chip(run.compute.chip)
    return c.bf16_flops_per_s if run.compute.precision == "bf16" else c.fp32_flops_per_s
