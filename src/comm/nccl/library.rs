//! The functions of the NCCL that is loaded, and its types.
//!
//! libtorch's CUDA half brings one (`libnccl.so.2`), and its functions are taken from there. A second one in the
//! same process, of another version, answers with errors: the symbols of the first are visible to it. cudarc's own
//! loader asks for `libnccl.so`, which is such a second one on many systems, so cudarc gives the types here and not
//! the functions.

use crate::comm::Element;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use std::{
    ffi::{c_char, c_int, c_void, CStr},
    mem::transmute,
    sync::OnceLock,
};

pub type Stream = *mut c_void;

/// Functions of the NCCL that libtorch brought, and libtorch's own for its current stream.
pub struct Library {
    pub error_string: unsafe extern "C" fn(ncclResult_t) -> *const c_char,
    pub unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> ncclResult_t,
    pub init_rank: unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t,
    pub async_error: unsafe extern "C" fn(ncclComm_t, *mut ncclResult_t) -> ncclResult_t,
    pub abort: unsafe extern "C" fn(ncclComm_t) -> ncclResult_t,
    pub group_start: unsafe extern "C" fn() -> ncclResult_t,
    pub group_end: unsafe extern "C" fn() -> ncclResult_t,
    pub all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclComm_t,
        Stream,
    ) -> ncclResult_t,
    pub reduce_scatter: Reduce,
    pub all_reduce: Reduce,
    pub send:
        unsafe extern "C" fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> ncclResult_t,
    pub recv:
        unsafe extern "C" fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> ncclResult_t,
    pub current_stream: unsafe extern "C" fn(i32, *mut Stream) -> i32,
}

pub type Reduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    Stream,
) -> ncclResult_t;

/// The functions, once libtorch's CUDA half is loaded.
pub fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

#[allow(
    clippy::missing_transmute_annotations,
    reason = "the fields of `Library` say the signatures"
)]
fn load() -> Result<Library, String> {
    let name = c"libnccl.so.2";
    // SAFETY: a name that ends in a zero byte; only a library that is loaded already is opened.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return Err(
            "no libnccl.so.2 is loaded: libtorch's CUDA half, which brings it, must be loaded first".into(),
        );
    }
    let find = |handle: *mut c_void, name: &CStr| {
        // SAFETY: an open library and a name that ends in a zero byte.
        let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
        let missing = || format!("the loaded libraries have no {}", name.to_string_lossy());
        (!symbol.is_null()).then_some(symbol).ok_or_else(missing)
    };
    let nccl = |name: &CStr| find(handle, name);
    let stream = find(libc::RTLD_DEFAULT, c"aoti_torch_get_current_cuda_stream")?;
    // SAFETY: the signatures are those of nccl.h (2.28) and of libtorch 2.11's C interface.
    unsafe {
        Ok(Library {
            error_string: transmute::<*mut c_void, _>(nccl(c"ncclGetErrorString")?),
            unique_id: transmute::<*mut c_void, _>(nccl(c"ncclGetUniqueId")?),
            init_rank: transmute::<*mut c_void, _>(nccl(c"ncclCommInitRank")?),
            async_error: transmute::<*mut c_void, _>(nccl(c"ncclCommGetAsyncError")?),
            abort: transmute::<*mut c_void, _>(nccl(c"ncclCommAbort")?),
            group_start: transmute::<*mut c_void, _>(nccl(c"ncclGroupStart")?),
            group_end: transmute::<*mut c_void, _>(nccl(c"ncclGroupEnd")?),
            all_gather: transmute::<*mut c_void, _>(nccl(c"ncclAllGather")?),
            reduce_scatter: transmute::<*mut c_void, Reduce>(nccl(c"ncclReduceScatter")?),
            all_reduce: transmute::<*mut c_void, Reduce>(nccl(c"ncclAllReduce")?),
            send: transmute::<*mut c_void, _>(nccl(c"ncclSend")?),
            recv: transmute::<*mut c_void, _>(nccl(c"ncclRecv")?),
            current_stream: transmute::<*mut c_void, _>(stream),
        })
    }
}

impl Library {
    pub fn check(&self, code: ncclResult_t) -> Result<(), String> {
        if code == ncclResult_t::ncclSuccess {
            return Ok(());
        }
        // SAFETY: NCCL gives a constant string for every code.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(format!(
            "NCCL: {} (NCCL_DEBUG=WARN in the environment says more)",
            text.to_string_lossy()
        ))
    }
}

pub fn kind(element: Element) -> ncclDataType_t {
    match element {
        Element::U8 => ncclDataType_t::ncclUint8,
        Element::I64 => ncclDataType_t::ncclInt64,
        Element::Bf16 => ncclDataType_t::ncclBfloat16,
        Element::F32 => ncclDataType_t::ncclFloat32,
        Element::F64 => ncclDataType_t::ncclFloat64,
    }
}
