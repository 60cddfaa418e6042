// The sums `d` of a warpgroup product, as its assembly lists them and as its constraints do (first ones at i).
#pragma once

#define SLIPSTREAM_LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SLIPSTREAM_LIST16 SLIPSTREAM_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SLIPSTREAM_LIST24 SLIPSTREAM_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SLIPSTREAM_LIST32 SLIPSTREAM_LIST24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SLIPSTREAM_LIST40 SLIPSTREAM_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SLIPSTREAM_LIST48 SLIPSTREAM_LIST40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SLIPSTREAM_LIST56 SLIPSTREAM_LIST48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SLIPSTREAM_LIST64 SLIPSTREAM_LIST56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SLIPSTREAM_LIST96                                                                                         \
  SLIPSTREAM_LIST64                                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define SLIPSTREAM_LIST128                                                                                            \
  SLIPSTREAM_LIST96                                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SLIPSTREAM_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SLIPSTREAM_SUMS8(i) SLIPSTREAM_SUMS4(i), SLIPSTREAM_SUMS4(i + 4)
#define SLIPSTREAM_SUMS16(i) SLIPSTREAM_SUMS8(i), SLIPSTREAM_SUMS8(i + 8)
#define SLIPSTREAM_SUMS32(i) SLIPSTREAM_SUMS16(i), SLIPSTREAM_SUMS16(i + 16)
