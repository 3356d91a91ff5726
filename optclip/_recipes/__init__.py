"""Published methods by their place in a step.

`_gradient_clipping` clips before the optimizer, `_optimizers` replaces Adam or limits
the final step, and `_skips` skips steps. `_recipe_options` holds their shared options.
"""
