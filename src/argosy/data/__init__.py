"""Text in, batches out: documents, corpora, the token store, the mixture and the loader."""
