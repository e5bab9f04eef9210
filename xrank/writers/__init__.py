"""Output formats, and the one protocol by which any output is staged, journaled and committed.

`commit` is the protocol, `folder_stage` and `bucket_stage` are its back ends, `staging` opens the right one.
`companions` and `hf_folder` lay outputs out: a format is a function that gives tensors their places in files before any
data moves, `hf_folder.lay_out` for model folders and `hf_folder.lay_out_state` for states of ranks. Both return
`xrank.plan.output.OutputFile`. To add one, write such a function, a plan that calls it and the filling of its stage
(`xrank.making.folder_filling`). No option chooses a format: each call of `xrank.conversion` has its own.
`xrank.conversion.checks` and `output_place` know safetensors files only.
"""
