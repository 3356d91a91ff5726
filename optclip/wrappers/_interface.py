"""What other packages of optclip use of `wrappers`, beside its public names."""

from optclip.wrappers._inner import transformation as transformation
