"""Object stores: checkpoints and models behind URLs, read by ranges and written without a local disk.

`url` says which paths are URLs, `places` lists and looks at files wherever they are, `client` sends the requests.
Nothing here imports a client library before a URL is opened.
"""
