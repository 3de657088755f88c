"""Every public name of Composer, for the page on moving from it. Data, nothing else."""

ALGORITHMS = """
Alibi AugMix BlurPool ChannelsLast ColOut CutMix CutOut EMA Factorize GatedLinearUnits GhostBatchNorm GradientClipping
GyroDropout LabelSmoothing LayerFreezing LowPrecisionGroupNorm LowPrecisionLayerNorm MixUp NoOpModel ProgressiveResizing
RandAugment SAM SelectiveBackprop SeqLengthWarmup SqueezeExcite StochasticDepth SWA WeightStandardization
""".split()
CALLBACKS = """
ActivationMonitor CheckpointSaver EarlyStopper ExportForInferenceCallback FreeOutputs Generate ImageVisualizer LoadCheckpoint
LRMonitor MemoryMonitor MemorySnapshot MLPerfCallback NaNMonitor OOMObserver OptimizerMonitor RuntimeEstimator SpeedMonitor
SystemMetricsMonitor ThresholdStopper
""".split()
LOGGERS = """
CometMLLogger ConsoleLogger FileLogger InMemoryLogger MLFlowLogger MosaicMLLogger NeptuneLogger ProgressBarLogger
RemoteUploaderDownloader SlackLogger TensorboardLogger WandBLogger
""".split()
STORES = {"S3ObjectStore": "s3", "GCSObjectStore": "gs", "OCIObjectStore": "oci", "LibcloudObjectStore": "azure",
          "SFTPObjectStore": "sftp", "UCObjectStore": "dbfs", "MLFlowObjectStore": "mlflow"}  # fmt: skip
EVENTS = """
INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START
BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH
BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END EVAL_BEFORE_ALL EVAL_START
EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END EVAL_AFTER_ALL EVAL_STANDALONE_START
EVAL_STANDALONE_END PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END
PREDICT_END
""".split()
ARGUMENTS = """
model train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders max_duration algorithms
algorithm_passes optimizers schedulers scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_interval
eval_subset_num_batches callbacks loggers run_name progress_bar log_to_console console_stream console_log_interval log_traces
auto_log_hparams load_path load_object_store load_weights_only load_strict_model_weights load_progress_bar load_ignore_keys
load_exclude_algorithms save_folder save_filename save_latest_filename save_overwrite save_interval save_weights_only
save_ignore_keys save_num_checkpoints_to_keep save_metrics autoresume parallelism_config device precision precision_config
device_train_microbatch_size accumulate_train_batch_on_tokens seed deterministic_mode dist_timeout ddp_sync_strategy profiler
python_log_level compile_config
""".split()
SCHEDULERS = """
DecoupledSGDW DecoupledAdamW StepScheduler MultiStepScheduler ConstantScheduler LinearScheduler ExponentialScheduler
CosineAnnealingScheduler CosineAnnealingWarmRestartsScheduler PolynomialScheduler MultiStepWithWarmupScheduler
ConstantWithWarmupScheduler LinearWithWarmupScheduler CosineAnnealingWithWarmupScheduler PolynomialWithWarmupScheduler
""".split()
CLASSES = {
    "Trainer": "kernel_core.Trainer", "Algorithm": "kernel_core.Algorithm", "Callback": "kernel_core.Callback",
    "LoggerDestination": "kernel_core.LoggerDestination", "State": "kernel_core.State", "Time": "kernel_core.Time",
    "Timestamp": "kernel_core.Timestamp", "DataSpec": "kernel_core.DataSpec", "Evaluator": "kernel_core.Evaluator",
    "ComposerModel": "kernel_core.TrainableModel", "ComposerClassifier": "kernel_core.Classifier",
    "HuggingFaceModel": "kernel_plugin_huggingface.HuggingFaceModel",
}  # fmt: skip
# where the name of a plugin is not that of the class in snake case
OTHERWISE = {
    "ProgressBarLogger": "progress_bar",
    "MixUp": "mixup",
    "BlurPool": "blurpool",
    "SelectiveBackprop": "selective_backprop",
}
# what is done otherwise here, in a few words
INSTEAD = {
    "algorithm_passes": "order is declared: [order](order.md)",
    "load_object_store": "a URL in `load_path`",
    "save_metrics": "always",
    "accumulate_train_batch_on_tokens": "always: `TrainableModel.loss_weight`",
    "ddp_sync_strategy": '`parallelism={"ddp": {"sync_strategy": ...}}`',
    "load_progress_bar": "no counterpart",
    "LoadCheckpoint": "`load_path` of `Trainer`",
    "RemoteUploaderDownloader": "checkpoints are saved straight to a URL",
    "MosaicMLLogger": "no counterpart",
}
