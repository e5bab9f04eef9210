"""Byte ranges of disks and object stores, and the one protocol by which any output is staged, journaled and committed.

`url` says which paths are URLs, `places` lists and looks at files wherever they are, `client` sends requests to stores,
`regular_file` and `entries` read files and JSON with errors that name the place. `commit` is the protocol of outputs,
`folder_stage` and `bucket_stage` are its back ends, `staging` opens the right one. No client library is imported before
a URL is opened.
"""
