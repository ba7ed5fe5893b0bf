"""llama.cpp's own server, in the process of its Python bindings: a GGUF on a port, until it is ended."""

import signal
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 2, 1
params.use_jinja = True
POOLING = {
    "vectors": xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN,
    "ranks": xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK,
}
for word in sys.argv[3:]:
    params.embedding, params.pooling_type = True, POOLING[word]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
