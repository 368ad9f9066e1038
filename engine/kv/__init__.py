"""The pool of KV blocks: hashes, blocks and tables. Ids only, no tensors."""
