// OpenMP's thread numbers. Without OpenMP its pragmas are ignored, and there is one thread.
#pragma once

#ifdef _OPENMP
extern "C" {  // declared here: Apple's clang has OpenMP without its header
int omp_get_num_threads(void);
int omp_get_thread_num(void);
}
#else
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif
