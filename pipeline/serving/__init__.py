"""The prediction server: `accrete serve` answers requests over HTTP from replicas of Ray Serve.

Start reading at `serve_command.running`. The server serves a bundle: a folder (model folder) with
everything that a finished method needs to classify images of all its tasks, see
`workers/serving/bundle.py`.
"""
