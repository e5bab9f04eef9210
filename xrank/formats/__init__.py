"""The bytes of file formats: parsing and building of headers, archives and pickles, without torch.

Readers of sources are in `xrank.readers`, the layouts of output files in `xrank.engine`.
"""
