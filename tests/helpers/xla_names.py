"""What the neuron backend reads of torch_xla's compiled module, which is installed for tests/xla alone."""

from __future__ import annotations

_NAMES = (
    "_check_tensor_need_materialization _get_stablehlo _get_xla_tensors_text _set_all_reduce_token "
    "_xla_counter_value _xla_get_default_device _xla_get_default_device_ordinal _xla_get_tensor_id "
    "_xla_set_default_device _xla_step_marker _xla_sync_multi _xla_user_computation _xla_wait_device_ops"
)
XLAC = tuple(_NAMES.split())
