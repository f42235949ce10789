"""What runs on accelerators: devices, the model, the prefix cache, the scheduler and the worker process.

torch is imported below this package only. Its plug-ins would load with it, and a torch_npu without its CANN
libraries then breaks `import torch` for everybody; so they stay out unless the user has set the variable, and
`relaygr.worker.device` imports torch_npu when the device is `npu`.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
