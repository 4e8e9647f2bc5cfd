/* Whether Python objects are as they were found: see `Networks` in ppokit/_networks.py. */

/* args, all lists: objects and their types; dictionaries and how many entries they have; dictionaries,
 * and the values of all of them in a row; dictionaries, names of entries, and what they equal. */
static PyObject *native_are_as_found(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 9)
        DECLINE;
    for (int k = 0; k < 9; k++)
        if (!PyList_Check(args[k]))
            DECLINE;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++)
        if ((PyObject *)Py_TYPE(PyList_GetItem(args[0], i)) != PyList_GetItem(args[1], i))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_Size(args[2]); i++) {
        PyObject *dictionary = PyList_GetItem(args[2], i);
        if (!PyDict_Check(dictionary))
            DECLINE;
        if (PyDict_Size(dictionary) != PyLong_AsSsize_t(PyList_GetItem(args[3], i)))
            Py_RETURN_FALSE;
    }
    Py_ssize_t seen = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(args[4]); i++) {
        PyObject *dictionary = PyList_GetItem(args[4], i), *key, *value;
        Py_ssize_t at = 0;
        if (!PyDict_Check(dictionary))
            DECLINE;
        while (PyDict_Next(dictionary, &at, &key, &value))
            if (seen >= PyList_Size(args[5]) || value != PyList_GetItem(args[5], seen++))
                Py_RETURN_FALSE;
    }
    if (seen != PyList_Size(args[5]))
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_Size(args[6]); i++) {
        PyObject *dictionary = PyList_GetItem(args[6], i), *value;
        if (!PyDict_Check(dictionary))
            DECLINE;
        if (!(value = PyDict_GetItemWithError(dictionary, PyList_GetItem(args[7], i)))) {
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_FALSE;
        }
        const int same = PyObject_RichCompareBool(value, PyList_GetItem(args[8], i), Py_EQ);
        if (same < 0)
            return NULL;
        if (!same)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
