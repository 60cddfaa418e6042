// Loads the libraries that are named, and says of each moment whether another backend is in the process.
#include <dlfcn.h>

#include <cstdio>

#include "server_exit.h"

// As in the library of the backend, of which this program takes the place.
extern "C" TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, const uint32_t) {
  return nullptr;
}

int main(int count, char** names) {
  printf("%d", slipstream::has_other_backends());
  for (int i = 1; i < count; ++i) {
    if (dlopen(names[i], RTLD_NOW | RTLD_LOCAL) == nullptr) return 1;
    printf(" %d", slipstream::has_other_backends());
  }
  printf("\n");
  return 0;
}
