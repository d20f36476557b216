"""Names that people have: Hub ids and folders of data become local files, and exports go to the Hub.

``names`` is the grammar of ids, ``selection`` says which files of a repository or folder are meant, ``download`` asks
the Hub, ``fetch`` does it for every key of a configuration, ``push`` uploads.  A repository of the Hub is not trusted:
only weights, json, tokenizers and tables are taken from it, never code.  Read ``names.py`` first.
"""
