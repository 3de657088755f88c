"""Objects in S3, and in stores that speak its protocol."""

from kernel_plugin_s3.storage import S3Storage as S3Storage

__all__ = ["S3Storage"]
