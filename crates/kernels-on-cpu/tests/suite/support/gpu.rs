//! The same launches on a real GPU, for the programs that `cargo xtask gpu-bundle` packs.
//!
//! `KERNEL_GPU` is the GPU's number, and `KERNEL_IMAGES` the folder that `cargo xtask kernels` fills. Kernels read and
//! write operands where the tests have them, so tests do not differ: all that such a program allocates is in one piece
//! of memory, which is pinned, and has the same addresses on the GPU.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{CString, c_void};
use std::fs;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::result::{self, module};
use cudarc::driver::{CudaContext, sys};
use inflight_kernels_on_cpu::{Arg, Dims};

/// A GPU and the kernels for it.
pub struct Gpu {
    context: std::sync::Arc<CudaContext>,
    modules: Vec<usize>,
}

impl Gpu {
    /// The GPU that tests run on, if it is one.
    pub fn here() -> Option<&'static Self> {
        static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
        let gpu = GPU.get_or_init(|| {
            let gpu = std::env::var("KERNEL_GPU").ok()?;
            let images = std::env::var_os("KERNEL_IMAGES").expect("KERNEL_IMAGES is set");
            let gpu = gpu.parse().expect("KERNEL_GPU is a number");
            Some(Self::open(gpu, Path::new(&images)))
        });
        gpu.as_ref()
    }

    fn open(gpu: usize, images: &Path) -> Self {
        let context = CudaContext::new(gpu).expect("a GPU");
        let (major, minor) = context.compute_capability().expect("a capability");
        let suffix = suffix_for(images, major, minor);
        let arena = arena().expect("operands are in one piece of memory");
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the memory is mapped, and stays to the end of the process.
        unsafe { sys::cuMemHostRegister_v2(arena.begin as *mut c_void, ARENA_BYTES, flags) }
            .result()
            .expect("memory that can be pinned");
        let files = fs::read_dir(images).expect("a folder of images");
        let paths = files.map(|file| file.expect("a file").path());
        let images = paths.filter(|path| path.to_string_lossy().ends_with(&suffix));
        let modules = images.map(|path| {
            let mut image = fs::read(path).expect("an image");
            // The driver reads PTX up to a zero.
            image.push(0);
            // SAFETY: the image is one that the compiler has written.
            let module = unsafe { module::load_data(image.as_ptr().cast()) };
            module.expect("an image for this GPU") as usize
        });
        Self {
            modules: modules.collect(),
            context,
        }
    }

    /// Runs a kernel to its end.
    ///
    /// # Safety
    ///
    /// As `inflight_kernels_on_cpu::launch`.
    pub unsafe fn launch(
        &self,
        kernel: &str,
        dims: Dims,
        args: &mut [Arg<'_>],
    ) -> Result<(), String> {
        let failed = |error| format!("{kernel}: {error}");
        self.context.bind_to_thread().map_err(failed)?;
        let function = self.function(kernel)?;
        for arg in &mut *args {
            check_address(kernel, arg)?;
        }
        let mut addresses: Vec<*mut c_void> = args.iter_mut().map(Arg::address).collect();
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let [x, y, z] = dims.grid;
        let [threads_x, threads_y, threads_z] = dims.block;
        // SAFETY: the caller vouches for the arguments, which stay until the GPU has been waited for.
        unsafe {
            result::function::set_function_attribute(function, most, dims.shared_bytes as i32)
                .map_err(failed)?;
            result::launch_kernel(
                function,
                (x, y, z),
                (threads_x, threads_y, threads_z),
                dims.shared_bytes as u32,
                null_mut(),
                &mut addresses,
            )
            .map_err(failed)?;
        }
        self.context.synchronize().map_err(failed)
    }

    fn function(&self, kernel: &str) -> Result<sys::CUfunction, String> {
        let name = CString::new(kernel).map_err(|error| error.to_string())?;
        let mut found = self.modules.iter().filter_map(|&module| {
            // SAFETY: the modules stay loaded.
            unsafe { module::get_function(module as sys::CUmodule, name.clone()) }.ok()
        });
        found
            .next()
            .ok_or_else(|| format!("no image has a kernel {kernel}"))
    }
}

/// How the names of the images for a capability end: those of the same major version and the largest minor one that is
/// not larger, or else what the driver compiles.
fn suffix_for(images: &Path, major: i32, minor: i32) -> String {
    let binaries = (0..=minor)
        .rev()
        .map(|minor| format!(".sm_{major}{minor}.cubin"));
    let has = |suffix: &String| images.join(format!("embed{suffix}")).is_file();
    let found = binaries.into_iter().find(has);
    found.unwrap_or_else(|| ".compute_90.ptx".to_owned())
}

/// An operand must be where the GPU finds it. An empty slice has no memory, and points to the number of its alignment.
fn check_address(kernel: &str, arg: &Arg<'_>) -> Result<(), String> {
    const MAX_ALIGNMENT: usize = 16;
    let is_found = |address: usize| {
        address <= MAX_ALIGNMENT || arena().is_some_and(|arena| arena.contains(address))
    };
    match arg.target().is_none_or(is_found) {
        true => Ok(()),
        false => Err(format!("{kernel}: an operand is no allocation of the test")),
    }
}

/// Enough for the operands of all tests.
const ARENA_BYTES: usize = 1 << 30;
/// Allocations are powers of two from here on, so that freed ones are found again.
const LEAST_BYTES: usize = 64;
const NUM_SIZES: usize = usize::BITS as usize;

/// One piece of memory, from which everything is allocated.
struct Arena {
    begin: usize,
    free: Mutex<FreeMemory>,
}

struct FreeMemory {
    /// What has never been allocated begins here.
    unused: usize,
    /// The first freed allocation of each size, which holds the address of the next one.
    freed: [usize; NUM_SIZES],
}

impl Arena {
    fn contains(&self, address: usize) -> bool {
        (self.begin..self.begin + ARENA_BYTES).contains(&address)
    }

    fn allocate(&self, layout: Layout) -> *mut u8 {
        let size = Self::size_of(layout);
        let mut free = self.free.lock().expect("nothing panics with the lock");
        let freed = &mut free.freed[size.trailing_zeros() as usize];
        if *freed != 0 {
            let address = *freed as *mut usize;
            // SAFETY: it was freed, holds the address of the next one, and nobody else has it.
            *freed = unsafe { address.read() };
            return address.cast();
        }
        let begin = free.unused.next_multiple_of(size);
        if begin + size > self.begin + ARENA_BYTES {
            return null_mut();
        }
        free.unused = begin + size;
        begin as *mut u8
    }

    fn free(&self, address: *mut u8, layout: Layout) {
        let size = Self::size_of(layout).trailing_zeros() as usize;
        let mut free = self.free.lock().expect("nothing panics with the lock");
        // SAFETY: nobody uses it any more, and it has room for an address.
        unsafe { address.cast::<usize>().write(free.freed[size]) };
        free.freed[size] = address as usize;
    }

    fn size_of(layout: Layout) -> usize {
        let num_bytes = layout.size().max(layout.align()).max(LEAST_BYTES);
        num_bytes.next_power_of_two()
    }
}

/// The arena of this process, if its tests run on a GPU.
fn arena() -> Option<&'static Arena> {
    static ARENA: OnceLock<Option<Arena>> = OnceLock::new();
    let arena = ARENA.get_or_init(|| {
        // SAFETY: the name is a C string. The standard library's function would allocate.
        if unsafe { libc::getenv(c"KERNEL_GPU".as_ptr()) }.is_null() {
            return None;
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, which takes no room until it is touched.
        let begin = unsafe { libc::mmap(null_mut(), ARENA_BYTES, access, flags, -1, 0) };
        (begin != libc::MAP_FAILED).then(|| Arena {
            begin: begin as usize,
            free: Mutex::new(FreeMemory {
                unused: begin as usize,
                freed: [0; NUM_SIZES],
            }),
        })
    });
    arena.as_ref()
}

/// The system's allocator, or the arena where tests run on a GPU.
struct Operands;

// SAFETY: the arena gives each piece to one owner at a time, aligned to its size.
unsafe impl GlobalAlloc for Operands {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match arena() {
            Some(arena) => arena.allocate(layout),
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        match arena() {
            Some(arena) => arena.free(address, layout),
            // SAFETY: the caller's promise.
            None => unsafe { System.dealloc(address, layout) },
        }
    }
}

#[global_allocator]
static ALLOCATOR: Operands = Operands;
