"""The engine: plan, prove and copy, from files or lent memory, by one rank or many.

`planner` matches a stored model with output files and proves that they are covered (`xrank.layout.coverage`).
`executor` copies under a budget of memory, `rounds` divides the work among ranks.

`hf_folder` and `companions` lay outputs out: a format is a function that gives tensors their places in files before any
data moves, `hf_folder.lay_out` for model folders and `hf_folder.lay_out_state` for states of ranks. Both return
`xrank.layout.output_files.OutputFile`. To add one, write such a function, a plan that calls it
(`xrank.recipes.decision` is one) and the filling of its stage (`xrank.commands.folder_filling`). No option chooses a
format: each command has its own. `xrank.commands.checks` and `xrank.storage.output_place` know safetensors files only.
"""
