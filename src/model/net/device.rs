//! Where tensors live, and the CUDA half of libtorch.
//!
//! The program links `libtorch_cpu` alone, so that the same file starts on machines without a GPU.
//! libtorch looks for its CUDA half once, when it is first asked about a device. Before that,
//! [`choose_device`] loads `libtorch_cuda.so` with its symbols visible to all, from the folder that
//! `libtorch_cpu.so` was loaded from: the two must be of one build. The loader finds that folder by
//! LD_LIBRARY_PATH first, then by the path built into the program.
//!
//! | Wanted | No driver, or a driver without a device | A device, libtorch without CUDA | A device and libtorch with CUDA |
//! |---|---|---|---|
//! | `cpu` | CPU | CPU | CPU |
//! | `auto` | CPU | error | CUDA |
//! | `cuda` | error | error | CUDA |
//!
//! `auto` does not fall back where a GPU is there: a run meant for it would take days on the CPU.
//!
//! Which device of a node: the rank's number among those of its node, unless the launcher shows each
//! rank one device alone.

use std::{
    ffi::{c_char, c_int, c_void, CStr, CString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};
use tch::Device;

/// Which device is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where the driver shows a device, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA, or an error.
    Cuda,
}

/// Why there is no CUDA device for this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No driver library.
    #[error(
        "no NVIDIA driver on this machine ({0}); compute on the CPU, or start the job on a node with a GPU"
    )]
    NoDriver(String),
    /// The driver answers with an error.
    #[error("the NVIDIA driver does not start ({function} gives {code}); `nvidia-smi` on this node says more, and inside a container the GPUs must be passed in")]
    Driver {
        /// What was called.
        function: &'static str,
        /// Its `CUresult`.
        code: i32,
    },
    /// The driver shows no device.
    #[error("the NVIDIA driver shows no device ({}); in a Slurm job, ask for GPUs (`--gpus-per-node`)", visible_text(.visible))]
    NoDevice {
        /// `CUDA_VISIBLE_DEVICES`.
        visible: Option<String>,
    },
    /// libtorch is a CPU build, or was trimmed to one.
    #[error("libtorch in `{}` has no libtorch_cuda.so; set LD_LIBRARY_PATH to the folders `torch/lib` and `nvidia/cu13/lib` of an installed PyTorch {} with CUDA", .folder.display(), TORCH_VERSION)]
    CpuBuild {
        /// Folder of libtorch_cpu.so.
        folder: PathBuf,
    },
    /// The loader refuses the file.
    #[error("`{}` cannot be loaded: {problem}; its CUDA libraries must be beside it in `nvidia/cu13/lib` or on LD_LIBRARY_PATH", .path.display())]
    Load {
        /// libtorch_cuda.so.
        path: PathBuf,
        /// What the loader says.
        problem: String,
    },
    /// libtorch and driver do not work together.
    #[error("the NVIDIA driver shows {devices} devices and libtorch can use none; libtorch was built for CUDA 13, which needs driver 580 or newer (`nvidia-smi` shows it)")]
    Unusable {
        /// Devices that the driver shows.
        devices: i32,
    },
    /// More ranks on the node than devices.
    #[error("no device for rank {local_rank} of this node: {devices} are visible ({}); ask for as many GPUs as ranks of a node, or give each rank its own (`--gpus-per-task=1`)", visible_text(.visible))]
    NoDeviceForRank {
        /// Number of the rank on its node, from 0 (`SLURM_LOCALID`).
        local_rank: u32,
        /// Visible devices.
        devices: i64,
        /// `CUDA_VISIBLE_DEVICES`.
        visible: Option<String>,
    },
}

/// The libtorch that this program is built for.
const TORCH_VERSION: &str = "2.11";

fn visible_text(visible: &Option<String>) -> String {
    match visible {
        Some(list) => format!("CUDA_VISIBLE_DEVICES={list}"),
        None => "CUDA_VISIBLE_DEVICES is not set".into(),
    }
}

fn visible_devices() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// The device of the rank with this number on its node. For CUDA, call it before any other work with
/// tensors: see the head of this module.
///
/// # Errors
/// What is missing, where CUDA was wanted or, with [`DeviceChoice::Auto`], a device is there.
pub fn choose_device(wanted: DeviceChoice, local_rank: u32) -> Result<Device, DeviceError> {
    if wanted == DeviceChoice::Cpu {
        return Ok(Device::Cpu);
    }
    match (wanted, driver_devices()) {
        (DeviceChoice::Auto, Err(DeviceError::NoDriver(_) | DeviceError::NoDevice { .. })) => Ok(Device::Cpu),
        (_, Err(error)) => Err(error),
        (_, Ok(devices)) => {
            static LOADED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
            LOADED.get_or_init(load_cuda).clone()?;
            let usable = tch::Cuda::device_count();
            if usable == 0 {
                return Err(DeviceError::Unusable { devices });
            }
            place_of(local_rank, usable).map(Device::Cuda)
        }
    }
}

/// Number of the device for a rank, of `devices` visible ones.
fn place_of(local_rank: u32, devices: i64) -> Result<usize, DeviceError> {
    match devices {
        1 => Ok(0),
        _ if i64::from(local_rank) < devices => Ok(local_rank as usize),
        _ => Err(DeviceError::NoDeviceForRank {
            local_rank,
            devices,
            visible: visible_devices(),
        }),
    }
}

/// Devices that the driver shows to this process, at least 1.
fn driver_devices() -> Result<i32, DeviceError> {
    let library = open(Path::new("libcuda.so.1"), libc::RTLD_LOCAL).map_err(DeviceError::NoDriver)?;
    let function = |name: &CStr| {
        // SAFETY: the handle is of a library that stays loaded, the name ends in a zero byte.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        let missing = || DeviceError::NoDriver(format!("libcuda.so.1 has no {}", name.to_string_lossy()));
        (!symbol.is_null()).then_some(symbol).ok_or_else(missing)
    };
    let check = |function: &'static str, code: c_int| match code {
        0 => Ok(()),
        // CUDA_ERROR_NO_DEVICE
        100 => Err(DeviceError::NoDevice {
            visible: visible_devices(),
        }),
        code => Err(DeviceError::Driver { function, code }),
    };
    // SAFETY: `CUresult cuInit(unsigned int)` of the CUDA driver API.
    let init: extern "C" fn(u32) -> c_int = unsafe { std::mem::transmute(function(c"cuInit")?) };
    // SAFETY: `CUresult cuDeviceGetCount(int *)` of the CUDA driver API.
    let count: extern "C" fn(*mut c_int) -> c_int =
        unsafe { std::mem::transmute(function(c"cuDeviceGetCount")?) };
    check("cuInit", init(0))?;
    let mut devices = 0;
    check("cuDeviceGetCount", count(&mut devices))?;
    if devices == 0 {
        return Err(DeviceError::NoDevice {
            visible: visible_devices(),
        });
    }
    Ok(devices)
}

/// Adds the CUDA half of libtorch to this process.
fn load_cuda() -> Result<(), DeviceError> {
    let folder = folder_of_libtorch();
    let path = folder.join("libtorch_cuda.so");
    if !path.is_file() {
        return Err(DeviceError::CpuBuild { folder });
    }
    match open(&path, libc::RTLD_GLOBAL) {
        Ok(_) => Ok(()),
        Err(problem) => Err(DeviceError::Load { path, problem }),
    }
}

/// Where libtorch_cpu.so lies.
fn folder_of_libtorch() -> PathBuf {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let symbol = super::dispatcher::torch_call_dispatcher as *const c_void;
    // SAFETY: the address is that of a function of libtorch_cpu.so, and `info` is a struct for the answer.
    if unsafe { libc::dladdr(symbol, &mut info) } == 0 || info.dli_fname.is_null() {
        return PathBuf::new();
    }
    // SAFETY: dladdr gives a string that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    // The folder as the loader spells it: its own search paths refer to it.
    path.parent().map_or_else(PathBuf::new, Path::to_path_buf)
}

/// Loads a library for the rest of the process, or says why not.
fn open(path: &Path, scope: c_int) -> Result<*mut c_void, String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: the name ends in a zero byte; initialisers of the library run, as for any linked one.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | scope) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror gives null or a string that is valid until the next call on this thread.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err("the loader gives no reason".into());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_visible_device_serves_every_rank_and_more_are_numbered() {
        assert_eq!(place_of(3, 1), Ok(0));
        assert_eq!(place_of(3, 4), Ok(3));
        let error = place_of(2, 2).unwrap_err().to_string();
        for part in [
            "rank 2 of this node",
            "2 are visible",
            "CUDA_VISIBLE_DEVICES",
            "--gpus-per-task",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    /// On a machine with a GPU the answers are other ones, and `tests/gpu` looks at them.
    #[test]
    fn without_a_driver_auto_is_the_cpu_and_cuda_says_what_is_missing() {
        if !matches!(driver_devices(), Err(DeviceError::NoDriver(_))) {
            eprintln!("skipped: there is an NVIDIA driver");
            return;
        }
        assert_eq!(choose_device(DeviceChoice::Auto, 0), Ok(Device::Cpu));
        let error = choose_device(DeviceChoice::Cuda, 0).unwrap_err().to_string();
        assert!(
            error.contains("no NVIDIA driver") && error.contains("libcuda.so.1"),
            "{error}"
        );
    }

    #[test]
    fn the_folder_of_libtorch_is_the_one_that_was_linked() {
        let folder = folder_of_libtorch();
        assert!(folder.join("libtorch_cpu.so").is_file(), "{}", folder.display());
        if !folder.join("libtorch_cuda.so").is_file() {
            let error = load_cuda().unwrap_err().to_string();
            assert!(
                error.contains("LD_LIBRARY_PATH") && error.contains("torch/lib"),
                "{error}"
            );
        }
    }
}
