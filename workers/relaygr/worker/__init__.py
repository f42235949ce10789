"""The worker: devices, the model, the prefix cache, the executor and the worker process.

Only this package and its users import torch. torch would load its plug-ins too, and a torch_npu without its CANN
libraries makes every `import torch` fail. So this package switches plug-in loading off, unless the user has set the
variable, and `relaygr.worker.device` imports torch_npu when the device is `npu`.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
