"""Export the parts of `norms` that other packages of optclip use."""

from optclip.norms._block import Block as Block
from optclip.norms._block import declared_across as declared_across
from optclip.norms._norm import INF as INF
from optclip.norms._norm import L2 as L2
from optclip.norms._norm import accumulator as accumulator
from optclip.norms._norm import of_order as of_order
from optclip.norms._norm_argument import BY_NAME as BY_NAME
from optclip.norms._norm_argument import NormLike as NormLike
from optclip.norms._norm_argument import as_norm as as_norm
from optclip.norms._norm_protocol import Measured as Measured
from optclip.norms._norm_protocol import Measurement as Measurement
from optclip.norms._roots import LEAST as LEAST
from optclip.norms._roots import flush_small as flush_small
