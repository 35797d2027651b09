"""The record of runs and searches in MLflow.

Start reading at `recorder.Recorder`. It queues actions in an `outbox.Outbox`, whose thread executes
them with a `run_writer.RunWriter`. In this package, a run of the pipeline ("graph") becomes several
runs in MLflow: one for the graph, and child runs for its methods and their tasks. The record in
MLflow is written from the `RunRecord` of the run (`runs/NAME/run.json`) and from the results in the
store, so it can be written again at any time.
"""
