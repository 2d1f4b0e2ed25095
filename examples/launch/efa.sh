# source efa.sh before torchrun, on instances with Elastic Fabric Adapters (trn1.32xlarge, trn1n, trn2)
export FI_PROVIDER=efa
export FI_EFA_USE_DEVICE_RDMA=1
export FI_EFA_FORK_SAFE=1
export NEURON_RT_ROOT_COMM_ID="${HEAD:?the name of one of the hosts}:${ROOT_PORT:-46820}"
