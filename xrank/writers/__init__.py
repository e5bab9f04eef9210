"""Output formats, and how any output is staged, journalled and committed by one rename.

A format is a function that lays tensors out in files before any data moves: `xrank.writers.hf_folder.lay_out` for
model folders, `xrank.writers.rank_states.lay_out_state` for rank states. Both return `xrank.plan.output.OutputFile`.
To add one, write such a function, a plan that calls it (`xrank.decisions.folder_plan`, `xrank.decisions.reshard_plan`),
and the filling of its stage (`xrank.making.folder_filling`, `xrank.making.folder_filling`). No option chooses a format:
each call of `xrank.conversion` has its own. `xrank.recipes.transforms` lays out model folders, too;
`xrank.conversion.checks` and `xrank.writers.output_place` know safetensors files only.
"""
