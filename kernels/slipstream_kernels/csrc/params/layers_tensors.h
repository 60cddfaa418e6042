// What a layer's pointers point to in the kernel of all layers, as decode_layers.py writes them to device memory.
#pragma once

namespace slipstream {

enum Product { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kNumProducts = 4 };

// One layer's pointers; a table of these lies in device memory.
struct LayerTensors {
  const void* weight[kNumProducts];   // rows, or int4 codes in the order of int4_layout.py
  const float* scale[kNumProducts];   // of a row of the weight, or null
  const void* words[kNumProducts];    // int4: scales and zero points, tile by tile, or null
  const void* norm[2];                // of the attention's and the MLP's input: [hidden_size]
  void* key_cache;                    // [num_blocks, num_kv_heads, block_size, 128]
  void* value_cache;
  const float* key_scale;             // [num_kv_heads] of an fp8 cache, or null: 1
  const float* value_scale;
};

}  // namespace slipstream
