"""Argosy: plan, ladder, forecast, train and publish a large sparse mixture-of-experts run.

The alphabet of tensor dimensions, one meaning each, used in annotations, einsum and `Leaf`:

======  ============================  ======  ============================
letter  meaning                       letter  meaning
======  ============================  ======  ============================
B       sequences in the batch        E       routed experts
S       positions in a sequence       K       experts per token
T       tokens on this shard          C       slots per expert (and wave)
D       model width                   W       waves
Z       latent width                  X       expert-parallel ranks
F       routed expert hidden width    G       hidden width of a shared expert
H       query heads                   N       key/value heads
A       head width                    L       layers
V       vocabulary                    M       key positions that a query sees
R       rank of a norm's gate         J       shared experts
======  ============================  ======  ============================

`axis` names a mesh axis (`replica`, `data`, `context`, `expert`), `dim` a tensor dimension.
"""

__version__ = "0.1.0"
