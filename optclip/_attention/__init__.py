"""Bound the largest attention logit of each head by scaling its weights (QK-Clip).

`_heads` names the leaves that hold queries and keys, `_attention_layers` locates the
heads in a tree, `_max_logit` computes the largest
logits, and `_qk_scaling` computes the factor of each leaf. `_clip_logits` is the pure
function, `_clip_logits_transform` the optax transformation.
"""
