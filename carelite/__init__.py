"""Mobile-friendly linear vision transformers: CARE and CAS-ViT, registered with timm on import.

Import by name what else there is: `carelite.data`, `training`, `fusion`, `export`, `verification`, `dense_prediction`,
`benchmark`, `ablations`, `attention_family`.
"""

from carelite.backbone import create_model, list_models, read_checkpoint
from carelite.care import CARE, CARE_CONFIGS
from carelite.cas_vit import CAS_VIT_CONFIGS, CASViT

__version__ = "0.1.0"
__all__ = [
    "CARE",
    "CARE_CONFIGS",
    "CASViT",
    "CAS_VIT_CONFIGS",
    "create_model",
    "list_models",
    "read_checkpoint",
]
